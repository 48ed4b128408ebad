import pytest
pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]
def test_shots(open_as):
    for name, width, dark in (("wide",1280,False),("dark",1280,True),("phone",390,False)):
        page = open_as("m-okafor", width=width, dark=dark)
        for path, url in (("home","/"),("launch","/launch/?kind=training"),("fair","/fair-share/")):
            page.goto(url); page.wait_for_timeout(1500)
            if path=="home":
                d=page.locator("details.fw-menu summary").first
                if d.count(): d.click()
                for x in page.locator(".fw-free details summary").all(): x.click()
            page.screenshot(path=f"/tmp/shots/{path}-{name}.png", full_page=True)
